"""A module or package for each framework. Each imports its framework, and nothing else of this package imports any of them."""
