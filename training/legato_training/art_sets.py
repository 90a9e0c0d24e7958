"""The art: which packages it comes from, under which licence, how a drawing is found in each."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ArtSet:
    """One drawing style. ``held_out`` sets are never trained on, they only measure."""

    name: str
    package: str
    version: str
    licence: str
    held_out: bool = False
    webp_by_code: bool = False


ART_SETS = (
    ArtSet("noto", "@iconify-json/noto", "1.2.9", "Apache-2.0"),
    ArtSet("noto-v1", "@iconify-json/noto-v1", "1.2.5", "Apache-2.0"),
    ArtSet("fluent", "@iconify-json/fluent-emoji", "1.2.7", "MIT"),
    ArtSet("fluent-flat", "@iconify-json/fluent-emoji-flat", "1.2.6", "MIT"),
    ArtSet("fluent-3d", "@lobehub/fluent-emoji-3d", "1.1.0", "MIT", webp_by_code=True),
    ArtSet("emojione", "@iconify-json/emojione", "1.2.3", "CC-BY-4.0"),
    ArtSet("fxemoji", "@iconify-json/fxemoji", "1.2.2", "Apache-2.0"),
    ArtSet("twemoji", "@iconify-json/twemoji", "1.2.5", "CC-BY-4.0", held_out=True),
    ArtSet("openmoji", "@iconify-json/openmoji", "1.2.29", "CC-BY-SA-4.0", held_out=True),
)
CODE_PACKAGE = ("emojibase-data", "17.0.0")
PHOTO_PACKAGE = ("@pmndrs/assets", "1.7.0")

# fxemoji squashes words and has names of its own.
FX_NAMES = {
    "sunglasses": "",
    "dog": "dogside",
    "dog face": "dog",
    "cat": "catside",
    "cat face": "cat",
    "rabbit": "bunnyside",
    "rabbit face": "bunny",
    "pig": "pigside",
    "pig face": "pig",
    "mouse": "mouseside",
    "mouse face": "mouse",
    "tiger": "tigerside",
    "tiger face": "tiger",
    "dragon": "dragonside",
    "dragon face": "dragonhead",
    "wolf": "wolfface",
    "panda": "pandaface",
    "ewe": "sheep",
    "camel": "dromedarycamel",
    "two-hump camel": "bactriancamel",
    "dove": "doveofpeace",
    "spouting whale": "spurtingwhale",
    "front-facing baby chick": "frontfacingchick",
    "evergreen tree": "evergreen",
    "eggplant": "aubergine",
    "ear of corn": "earofmaize",
    "hot pepper": "chilipepper",
    "pizza": "sliceofpizza",
    "house": "housebuilding",
    "castle": "europeancastle",
    "locomotive": "steamlocomotive",
    "racing car": "racecar",
    "passenger ship": "ship",
    "globe showing Europe-Africa": "europeafricaglobe",
    "globe showing Americas": "americasglobe",
    "globe showing Asia-Australia": "asiaaustraliaglobe",
    "hourglass done": "hourglass",
    "hourglass not done": "hourglassflowingsand",
    "mantelpiece clock": "manltepiececlock",
    "two o’clock": "clock2oclock",
    "sun": "sunrays",
    "high voltage": "lightningmood",
    "snowman": "snowmanwithoutsnow",
    "basketball": "basketballandhoop",
    "tennis": "tennisball",
    "fishing pole": "fishingpoleandfish",
    "bullseye": "directhit",
    "pool 8 ball": "billiards",
    "video game": "videogame",
    "framed picture": "framewithpicture",
    "necktie": "tie",
    "t-shirt": "mansshirt",
    "backpack": "schoolsatchel",
    "man’s shoe": "mensshoe",
    "woman’s boot": "boot",
    "high-heeled shoe": "heels",
    "gem stone": "gem",
    "studio microphone": "studiomic",
    "mobile phone": "cellphone",
    "telephone": "blacktelephone",
    "laptop": "personalcomputer",
    "computer mouse": "twobuttonmouse",
    "optical disk": "opticaldisc",
    "flashlight": "electrictorch",
    "magnifying glass tilted left": "leftmagnifyingglass",
    "magnifying glass tilted right": "rightmagnifyingglass",
    "red paper lantern": "izakayalantern",
    "closed mailbox with raised flag": "closedmailboxraised",
    "closed mailbox with lowered flag": "closedmailboxlowered",
    "pen": "lowerleftpen",
    "paintbrush": "lowerleftpaintbrush",
    "scissors": "blackscissors",
    "locked": "lock",
    "locked with key": "lockandkey",
    "dagger": "daggerknife",
    "pile of poo": "poo",
    "snow-capped mountain": "snowmountains",
    "motor scooter": "",
    "1st place medal": "",
    "ice cream": "icecream",
    "bottle with popping cork": "",
    "sun with face": "sunwithface",
    "balance scale": "",
}


def slug(label: str) -> str:
    """CLDR label -> the hyphenated name Iconify uses."""
    plain = label.lower().replace("’", "").replace("'", "")
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def find_icon(art_set: ArtSet, label: str, names: set[str]) -> str | None:
    """Return the icon of ``label`` in a set, or None when the set does not draw it."""
    if art_set.name == "fxemoji":
        wanted = FX_NAMES.get(label, slug(label).replace("-", ""))
    else:
        wanted = slug(label)
    return wanted if wanted in names else None
