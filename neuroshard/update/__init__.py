"""New versions of the program: signed manifests, downloads, versions side by side, and the switch. Only on request."""
