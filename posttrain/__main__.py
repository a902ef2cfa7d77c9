"""The `posttrain` command."""

from __future__ import annotations

from posttrain.cli.app import app


def main() -> None:
    """Run the command line in this process."""
    app(prog_name="posttrain")


if __name__ == "__main__":
    main()
