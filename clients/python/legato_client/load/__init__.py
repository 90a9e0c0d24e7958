"""Load on a server, open or closed, and what it answered with: `legato bench --serve`.

An open loop sends at times fixed beforehand, whatever the server does, and measures from those
times. A server that stalls is then charged with the wait of everybody who would have come, which a
caller that waits for one answer before it asks again leaves out (coordinated omission).
"""
