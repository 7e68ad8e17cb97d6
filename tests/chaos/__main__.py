"""Command line of the campaign."""

import sys

from .campaign import main

sys.exit(main())
