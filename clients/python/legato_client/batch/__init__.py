"""Many pictures: what `legato run` does.

Sources give pictures, threads ask about them over one client, and each answer is a line of a file
that a later run goes on with. Drawings and COCO files are made from the finished lines.
"""
