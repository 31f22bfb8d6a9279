"""``python -m offbeat`` is ``offbeat``."""

from offbeat.cli.main import main

if __name__ == "__main__":
    main()
