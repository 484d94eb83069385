"""``python -m flashgen`` is the program ``flashgen``."""

from flashgen.tools.cli import main

if __name__ == "__main__":
    main()
