"""`python -m offbeat`: the command line of just this Python's offbeat, whatever is on the path."""

import sys

from offbeat.cli.main import main

sys.exit(main())
