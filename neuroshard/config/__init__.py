"""Settings, which belong to the owner of this computer, and RunParameters, which belong to a run. They never merge."""
