"""Prove on the user's own model and batch that tiling changes no gradient, and count what it costs.

The judge is arithmetic's own error: the untiled run's distance from a run in higher precision. A tiled gradient may be
twice as far from that truth as the untiled one is, plus a hundred-thousandth of its size, in maximum and in L2 norm.
"""

from seqtile.verification.compare import verify
from seqtile.verification.gradients import check_gradients
from seqtile.verification.result import Difference, Group, Run, VerifyResult

__all__ = ["Difference", "Group", "Run", "VerifyResult", "check_gradients", "verify"]
