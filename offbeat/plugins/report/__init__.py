"""``offbeat report``: one self-contained page on a run, from its run directory alone.

story     one pass over the journal: every fold below      timeline    lanes, incidents, quiet spells
steps     applied steps, joined with their metrics         group_rows  a row per prompt group
shares    shares of time per interval                      examples    samples of some groups
verdicts  how the run ended, and what to do                document    what the page is made of
packing   numbers as typed columns                         page        the HTML file around it
web/      the page's own code and style
"""
