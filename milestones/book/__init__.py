"""The book: a web site that is made from the pages of this repository, with figures that run.

    command.py        `python -m milestones site`: makes the site in build/site
    staging.py        which pages the site has, and where their links lead
    conf.py           the settings of Sphinx, which turns pages into HTML
    directive.py      the directives: a figure, another page in a frame
    figure.py         what a figure is: a question, controls, and a function that draws
    figures/          the figures; each runs the core of a milestone, or the router
    core_run.py       runs a core in plain Python, and notes what each step does
    browser_files.py  what a browser needs: Python for the browser, and our files
    compile_library.mjs  compiles Python's library, in Node
    exercise_files.py what a tab needs for the exercises: a student's tree, pytest
    workbench.py      runs the tests of an exercise in a tab; report.py: what it shows
    exercise_pages.py the pages of the exercises, with an editor
    diff_pages.py     a page for each stop of a difference, with the reasons
    museum_pages.py   a page for each bug of the museum
    inserts.py        the tables in the chapters that are made from the course
    pages/            the chapters
    static/           the glue in the page: scripts, one worker, one style sheet

A figure is drawn twice by the same function: when the site is made, so that a page is complete
without scripts, and in the reader's browser, with the values that the reader chooses.
"""
