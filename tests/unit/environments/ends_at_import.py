"""A script that was taken for a module: it ends whoever imports it."""

import sys

sys.exit(3)
