"""A local Ray cluster that outlasts its command, with the engines in it, for the next command.

A keeper process (`keeper`) owns the cluster and ends it once no command has used it for a while. A
command claims it through a Unix socket (`claim`), one command at a time. The open connection is the
claim, so the end of the command releases it, however the command ends.
"""
