"""`python -m launch.demo`."""

import sys

from launch.demo.run import main

sys.exit(main())
