"""A comparison of methods: their runs, the arms that come of them, and what is said about those."""
