"""`python -m orchestrator.cli` is the command `orch`."""

from orchestrator.cli import main

if __name__ == "__main__":
    main()
