"""Open-loop and closed-loop load generation: `legato bench --serve`.

An open loop sends at times fixed beforehand, whatever the server does, and measures from those
times. A stall then counts against every request that was due during it, which a closed loop leaves
out (coordinated omission).
"""
