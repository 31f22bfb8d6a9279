"""``offbeat report``: one self-contained page on a run, from its run directory alone.

story     one pass over the journal: every fold below      timeline    lanes, incidents, shares of time
group_rows  a row per prompt group
verdicts  how the run ended, and what to do                examples    samples of some groups
document    what the page is made of
web/      the page's own code and style                    page        the HTML file around it
"""
