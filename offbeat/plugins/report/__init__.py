"""``offbeat report``: one self-contained page on a run, made only from its run directory.

story     one pass over the journal: every fold below      timeline    lanes, incidents, shares of time
group_rows  a row per prompt group
verdicts  how the run ended, and what to do                examples    samples of some groups
same_prompt  the same prompts early and late
document    content of the page
web/      the page's code and style                        page        the HTML file around it
"""
