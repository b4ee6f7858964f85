"""Works over the finished HTML files."""


def finish(app, error):
    pass
