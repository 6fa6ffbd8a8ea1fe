"""The map's data structures: tables of confirmed blocks, trees of predicted and modelled blocks, longest match."""
