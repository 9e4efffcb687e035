"""The routes by subject; each module makes one router from what its handlers need."""
