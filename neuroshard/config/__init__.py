"""What the owner of this computer sets (Settings) and what the owner of a run sets (RunParameters). They never merge."""
