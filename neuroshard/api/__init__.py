"""The REST API and the dashboard: reads the status board, sends typed commands, never touches live objects."""
