"""Which replicas hold which block: the block table, chains of predicted and modelled blocks, and longest match."""
