"""Command line of the simulation."""

import sys

from .campaign import main

sys.exit(main())
