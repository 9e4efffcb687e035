"""The owner's computer: sensors, policy and limits, autostart, the desktop, and this computer's identity."""
