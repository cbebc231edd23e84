import sys

from strop.cli import main

sys.exit(main())
