"""Everything that says mindspore."""
