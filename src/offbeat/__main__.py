"""`python -m offbeat`: the command line of the offbeat that this Python imports, whatever is on the PATH."""

import sys

from offbeat.cli.main import main

sys.exit(main())
