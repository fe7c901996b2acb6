"""What this package offers for libraries that it does not need."""
