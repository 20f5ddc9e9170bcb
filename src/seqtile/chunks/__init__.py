"""Decoder layers over chunks of the sequence that hand keys, values and states on."""
