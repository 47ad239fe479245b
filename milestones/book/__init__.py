"""The book: a web site that is made from the pages of this repository, with figures that run.

    command.py        `python -m milestones site`: makes the site in build/site
    staging.py        which pages the site has, and where their links lead
    conf.py           the settings of Sphinx, which turns pages into HTML
    directive.py      the directive of a figure in a page
    figure.py         what a figure is: a question, controls, and a function that draws
    figures/          the figures; each runs the core of a milestone
    core_run.py       runs a core in plain Python, and notes what each step does
    browser_files.py  what a browser needs: Python for the browser, and our files
    pages/            the chapters
    static/           the glue in the page: one script, one worker, one style sheet

A figure is drawn twice by the same function: when the site is made, so that a page is complete
without scripts, and in the reader's browser, with the values that the reader chooses.
"""
