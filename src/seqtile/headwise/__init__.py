"""Attention by groups of heads: recogniser and installer."""
