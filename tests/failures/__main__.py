"""Command line of the failing nights."""

import sys

from .campaign import main

sys.exit(main())
