"""What the ranks of one trainer do together: process group, collectives, dispatch of groups."""
