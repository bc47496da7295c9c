"""What public planners aim at, written anew from their papers' formulas, for comparison.

Each file is one of them. A peer knows the layers on one kind of device and one bandwidth (`known.Known`), or, where its
paper says so, which devices share a server. It gives cuts, how many devices each stage has, and where it has rules for
that, which devices they are.
"""
