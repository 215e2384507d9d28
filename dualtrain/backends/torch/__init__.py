"""Everything that says torch."""
