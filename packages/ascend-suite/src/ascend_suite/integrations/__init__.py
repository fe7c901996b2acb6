"""What belongs to other frameworks. Nothing is imported from here."""
