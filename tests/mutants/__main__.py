"""Command line of the mutants."""

import sys

from .campaign import main

sys.exit(main())
