"""The REST API and the dashboard. They read the status board and send typed commands, but never use live objects."""
