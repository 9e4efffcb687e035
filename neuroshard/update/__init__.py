"""New versions of the program: signed metadata, downloads, versions side by side, and the switch. Only on request."""
