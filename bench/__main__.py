"""Entry point of ``python -m bench``."""

if __name__ == "__main__":
    try:
        from bench.cli import main

        status = main()
    except KeyboardInterrupt:  # while importing, or after the command
        status = 130
    raise SystemExit(status)
