"""The ``octavo`` command: one file a subcommand, errors and exit statuses in main.py."""
