"""For ms-swift's ``--external_plugins``; ``python -m seqtile.integrations.ms_swift`` prints where this file is."""

from seqtile.integrations.ms_swift import register

register()
