"""Run the command line: `python -m gradfilter`."""

import sys

from gradfilter.cli import main

sys.exit(main())
