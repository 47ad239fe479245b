"""The command line of the demo."""

from . import main

if __name__ == "__main__":
    main()
