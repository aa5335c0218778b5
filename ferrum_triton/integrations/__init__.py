"""Other libraries' calls, answered by this one: one file a library, which alone imports it."""
