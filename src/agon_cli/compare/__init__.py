"""Methods compared at equal budget: cells are trained where they are missing, then arms, statistics and a document."""
