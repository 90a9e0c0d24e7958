"""What can be named: kinds (a noun, or a shape in a colour), phrases that ask for them, groups.

Nouns: one line each, ``name; synonym; ... = label, label, ...``. A label is the Unicode (CLDR)
short name of an emoji drawing that shows it; a missing right side means the label is the name.
Near-identical drawings share one noun.
"""

from dataclasses import dataclass
from functools import lru_cache

ANIMALS = """
dog; puppy = dog, dog face, poodle, guide dog, service dog
cat; kitten = cat, cat face, black cat
wolf
fox
lion
tiger = tiger, tiger face
horse = horse, horse face
unicorn
zebra
deer
cow = cow, cow face
pig = pig, pig face
sheep; ram = ewe, ram
goat
camel = camel, two-hump camel
giraffe
elephant
rhinoceros; rhino
mouse = mouse, mouse face
rabbit; bunny = rabbit, rabbit face
squirrel; chipmunk = chipmunk
bat
bear
polar bear
koala
panda
kangaroo
monkey = monkey, monkey face
turkey
chicken; hen = chicken
rooster
chick = baby chick, front-facing baby chick, hatching chick
bird = bird
dove = dove
duck
owl
flamingo
peacock
parrot
penguin
frog
crocodile; alligator
turtle; tortoise
lizard
snake
dragon = dragon, dragon face
dinosaur = sauropod, T-Rex
whale = whale, spouting whale
dolphin
fish = fish, tropical fish
shark
octopus
squid
crab
lobster
shrimp; prawn
snail
butterfly
caterpillar = bug
ant
bee; honeybee = honeybee
ladybug; ladybird = lady beetle
spider
scorpion
"""

PLANTS = """
flower = cherry blossom, white flower, hibiscus, blossom
rose
sunflower
tulip
bouquet
pine tree; fir tree = evergreen tree
tree = deciduous tree
palm tree; palm
cactus
clover = four leaf clover, shamrock
leaf; maple leaf = maple leaf, fallen leaf
mushroom
Christmas tree
"""

FOOD = """
grapes; bunch of grapes
watermelon
orange; tangerine = tangerine
lemon
banana
pineapple
red apple
green apple
pear
peach
cherries; pair of cherries
strawberry
kiwi; kiwi fruit = kiwi fruit
tomato
avocado
eggplant; aubergine
potato
carrot
corn; ear of corn = ear of corn
chili pepper; hot pepper = hot pepper
cucumber
broccoli
bread; loaf of bread = bread
croissant
baguette = baguette bread
pancakes; stack of pancakes = pancakes
cheese; piece of cheese = cheese wedge
bacon
hamburger; burger
french fries; fries = french fries
pizza; slice of pizza
hot dog
sandwich
taco
egg = egg
popcorn
sushi
ice cream cone = soft ice cream
ice cream
doughnut; donut
cookie; biscuit
birthday cake; cake
slice of cake = shortcake
cupcake
candy; sweet = candy
lollipop
glass of milk; milk = glass of milk
cup; cup of coffee; mug = hot beverage, teacup without handle
teapot
bottle = bottle with popping cork, baby bottle
wine glass; glass of wine = wine glass
cocktail; cocktail glass = cocktail glass
beer; mug of beer = beer mug
"""

TRAVEL = """
globe = globe showing Europe-Africa, globe showing Americas, globe showing Asia-Australia
mountain = snow-capped mountain, mountain
volcano
house = house, house with garden
castle = castle
church
tent
ferris wheel
train; locomotive = locomotive, train
tram = tram
bus = bus, oncoming bus, trolleybus
ambulance
fire engine; fire truck
police car = police car, oncoming police car
taxi; cab = taxi, oncoming taxi
car; automobile = automobile, oncoming automobile, sport utility vehicle
truck; lorry = delivery truck, articulated lorry
tractor
racing car; race car = racing car
motorcycle; motorbike
scooter; motor scooter = motor scooter
bicycle; bike
skateboard
gas pump; fuel pump = fuel pump
wheel; tire = wheel
traffic light = vertical traffic light, horizontal traffic light
stop sign
anchor
sailboat
ship = ship, passenger ship
airplane; plane = airplane, small airplane
helicopter
rocket
flying saucer; UFO = flying saucer
"""

THINGS = """
hourglass = hourglass done, hourglass not done
watch; wristwatch = watch
clock; alarm clock = alarm clock, mantelpiece clock, two o’clock, ten o’clock
thermometer
moon = crescent moon, first quarter moon face, last quarter moon face
sun = sun, sun with face
planet = ringed planet
cloud
rainbow
umbrella = umbrella, umbrella with rain drops
lightning bolt; lightning = high voltage
snowflake
snowman = snowman, snowman without snow
fire; flame = fire
water drop; droplet = droplet
pumpkin; jack-o-lantern = jack-o-lantern
balloon
gift; present = wrapped gift
ribbon = ribbon
medal = sports medal, military medal, 1st place medal
trophy
soccer ball
baseball
basketball
volleyball
American football; football = american football
tennis ball = tennis
boxing glove
ice skate
fishing rod; fishing pole = fishing pole
target; bullseye = bullseye
kite
pool ball; eight ball = pool 8 ball
crystal ball
magic wand
game controller; gamepad = video game
die; dice = game die
puzzle piece
teddy bear
framed picture; painting = framed picture
palette; paint palette = artist palette
ball of yarn; yarn = yarn
glasses; pair of glasses = glasses
sunglasses
tie; necktie = necktie
T-shirt; shirt = t-shirt
jeans; trousers = jeans
gloves; pair of gloves = gloves
dress = dress
bikini
handbag = handbag
shopping bags = shopping bags
backpack; rucksack = backpack
shoe = man’s shoe, running shoe
boot = hiking boot, woman’s boot
high heel; high-heeled shoe = high-heeled shoe
crown
hat; sun hat = woman’s hat
top hat
graduation cap
lipstick
ring
gem; diamond = gem stone
megaphone
bell
musical note = musical note
microphone = microphone, studio microphone
headphones = headphone
saxophone
trumpet
guitar
piano; keyboard = musical keyboard
violin
drum
phone; mobile phone; smartphone = mobile phone
telephone = telephone
laptop
computer; desktop computer = desktop computer
printer
computer mouse
CD; disc = optical disk, dvd
television; TV = television
camera = camera, camera with flash
magnifying glass = magnifying glass tilted left, magnifying glass tilted right
candle
light bulb
flashlight; torch = flashlight
lantern; red lantern = red paper lantern
book = closed book, open book, green book, blue book, orange book
newspaper
money bag
credit card
envelope; letter = envelope
package; box = package
mailbox = closed mailbox with raised flag, closed mailbox with lowered flag
pencil
pen = pen
paintbrush = paintbrush
calendar = calendar, tear-off calendar
paperclip
ruler = straight ruler
scissors; pair of scissors
trash can; bin = wastebasket
padlock; lock = locked, locked with key
key = key, old key
hammer
axe
pickaxe = pick
sword; dagger = dagger
bomb
bow and arrow
shield
saw = carpentry saw
wrench; spanner = wrench
screwdriver
gear; cog = gear
scales; balance scale = balance scale
magnet
ladder
microscope
telescope
satellite dish = satellite antenna
syringe
pill
door
bed = bed
chair = chair
sofa; couch = couch and lamp
toilet
broom
bucket
toothbrush
fire extinguisher
shopping cart
ghost
robot
alien
skull
poop = pile of poo
eye
brain
"""

# group name -> (synonyms, members); a group is asked for as one noun covering all members.
GROUPS = {
    "apple": ((), ("red apple", "green apple")),
    "animal": ((), tuple(ANIMALS.split("\n"))),
    "fruit": (
        (),
        (
            "grapes",
            "watermelon",
            "orange",
            "lemon",
            "banana",
            "pineapple",
            "red apple",
            "green apple",
            "pear",
            "peach",
            "cherries",
            "strawberry",
            "kiwi",
        ),
    ),
    "vehicle": (
        (),
        (
            "train",
            "tram",
            "bus",
            "ambulance",
            "fire engine",
            "police car",
            "taxi",
            "car",
            "truck",
            "tractor",
            "racing car",
            "motorcycle",
            "scooter",
            "bicycle",
            "sailboat",
            "ship",
            "airplane",
            "helicopter",
            "rocket",
        ),
    ),
    "ball": (
        (),
        ("soccer ball", "baseball", "basketball", "volleyball", "tennis ball", "pool ball"),
    ),
}

IRREGULAR_PLURALS = {
    "mouse": "mice",
    "computer mouse": "computer mice",
    "wolf": "wolves",
    "deer": "deer",
    "moose": "moose",
    "sheep": "sheep",
    "goose": "geese",
    "ox": "oxen",
    "fish": "fish",
    "blowfish": "blowfish",
    "pufferfish": "pufferfish",
    "squid": "squid",
    "shrimp": "shrimp",
    "leaf": "leaves",
    "loaf of bread": "loaves of bread",
    "maple leaf": "maple leaves",
    "die": "dice",
    "dice": "dice",
    "tooth": "teeth",
    "cactus": "cacti",
    "box": "boxes",
    "potato": "potatoes",
    "tomato": "tomatoes",
    "mango": "mangoes",
    "bread": "loaves of bread",
    "popcorn": "boxes of popcorn",
    "broccoli": "broccoli",
    "garlic": "bulbs of garlic",
    "corn": "ears of corn",
    "bacon": "strips of bacon",
    "sushi": "pieces of sushi",
    "cheese": "pieces of cheese",
    "salad": "salads",
    "milk": "glasses of milk",
    "radio": "radios",
    "piano": "pianos",
    "chocolate": "chocolate bars",
    "lightning": "lightning bolts",
    "yarn": "balls of yarn",
    "thread": "spools of thread",
    "soap": "bars of soap",
    "footprints": "footprints",
    "calf": "calves",
    "pants": "pants",
    "scarf": "scarves",
    "bow and arrow": "bows and arrows",
    "scales": "scales",
    "bullseye": "bullseyes",
    "avocado": "avocados",
    "burrito": "burritos",
    "taco": "tacos",
    "kangaroo": "kangaroos",
    "flamingo": "flamingos",
    "rhino": "rhinos",
    "hippo": "hippos",
    "yo-yo": "yo-yos",
    "volcano": "volcanoes",
    "UFO": "UFOs",
    "TV": "TVs",
    "CD": "CDs",
    "pair of cherries": "pairs of cherries",
    "octopus": "octopuses",
}
ALREADY_PLURAL = {
    "grapes",
    "cherries",
    "pancakes",
    "french fries",
    "fries",
    "glasses",
    "sunglasses",
    "jeans",
    "trousers",
    "gloves",
    "socks",
    "shorts",
    "shopping bags",
    "headphones",
    "scissors",
    "paw prints",
    "scales",
    "footprints",
    "lips",
}
NO_MIRROR = {
    "clock",
    "stop sign",
    "musical note",
    "die",
    "floppy disk",
    "calendar",
    "newspaper",
    "pool ball",
    "piano",
    "watch",
    "pill",
    "abacus",
    "medal",
    "CD",
}


@dataclass(frozen=True)
class Noun:
    """``names[0]`` is the caption name; ``plurals`` matches ``names``; ``labels`` pick drawings."""

    names: tuple[str, ...]
    plurals: tuple[str, ...]
    labels: tuple[str, ...]
    mirror: bool


def pluralise(name: str) -> str:
    """Return the plural used in captions and counting questions."""
    if name in ALREADY_PLURAL:
        return name
    if name in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[name]
    if " of " in name:
        head, tail = name.split(" of ", 1)
        return f"{pluralise(head)} of {tail}"
    if name.endswith(("s", "x", "ch", "sh")):
        return name + "es"
    if name.endswith("y") and name[-2] not in "aeiou":
        return name[:-1] + "ies"
    return name + "s"


def with_article(name: str) -> str:
    """Return ``a dog``, ``an apple`` or ``grapes``."""
    if name in ALREADY_PLURAL or name in (
        "bread",
        "bacon",
        "popcorn",
        "garlic",
        "broccoli",
        "sushi",
        "soap",
    ):
        return name
    vowel = name[0].lower() in "aeiou" and not name.startswith(("unicorn", "UFO"))
    return f"{'an' if vowel else 'a'} {name}"


def parse_line(line: str) -> Noun:
    """One line of the tables above."""
    left, _, right = line.partition(" = ")
    names = tuple(part.strip() for part in left.split(";"))
    labels = tuple(part.strip() for part in right.split(",")) if right else (names[0],)
    return Noun(names, tuple(pluralise(name) for name in names), labels, names[0] not in NO_MIRROR)


def all_nouns() -> list[Noun]:
    """Every noun in table order."""
    tables = (ANIMALS, PLANTS, FOOD, TRAVEL, THINGS)
    return [parse_line(line) for table in tables for line in table.strip().split("\n")]


def group_members() -> dict[str, list[int]]:
    """Group name -> indices into ``all_nouns()``."""
    index = {noun.names[0]: i for i, noun in enumerate(all_nouns())}
    animals = [index[parse_line(line).names[0]] for line in ANIMALS.strip().split("\n")]
    members = {
        name: [index[m] for m in listed] for name, (_, listed) in GROUPS.items() if name != "animal"
    }
    return members | {"animal": animals}


# ---------------------------------------------------------------- kinds and phrases

SHAPES = (
    "circle",
    "square",
    "triangle",
    "star",
    "heart",
    "diamond shape",
    "pentagon",
    "hexagon",
    "cross",
    "ring shape",
    "arrow",
    "oval",
)
# Named colours and the RGB (0..1) their tint is jittered around.
COLOURS = {
    "red": (0.88, 0.12, 0.12),
    "orange": (0.97, 0.55, 0.08),
    "yellow": (0.98, 0.86, 0.12),
    "green": (0.13, 0.66, 0.22),
    "blue": (0.12, 0.35, 0.88),
    "purple": (0.52, 0.18, 0.72),
    "pink": (0.97, 0.50, 0.72),
    "brown": (0.47, 0.28, 0.14),
    "black": (0.06, 0.06, 0.06),
    "white": (0.97, 0.97, 0.97),
    "gray": (0.52, 0.52, 0.52),
}
COLOUR_NAMES = tuple(COLOURS)


@dataclass(frozen=True)
class Kind:
    """One class of objects; ``shape`` and ``colour`` are indices for drawn shapes, else -1."""

    names: tuple[str, ...]
    plurals: tuple[str, ...]
    mirror: bool
    shape: int = -1
    colour: int = -1


@dataclass(frozen=True)
class Phrase:
    """Something one can ask for and the kinds it covers."""

    singular: str
    plural: str
    kinds: frozenset[int]


@dataclass(frozen=True)
class Lexicon:
    """All kinds; phrases per kind (its own names first) and the groups that contain it."""

    kinds: tuple[Kind, ...]
    phrases_of: tuple[tuple[Phrase, ...], ...]
    groups_of: tuple[tuple[Phrase, ...], ...]
    num_nouns: int


def noun_kinds() -> list[Kind]:
    return [Kind(noun.names, noun.plurals, noun.mirror) for noun in all_nouns()]


def shape_kinds() -> list[Kind]:
    """Every shape in every colour."""
    kinds = []
    for shape, name in enumerate(SHAPES):
        for colour, colour_name in enumerate(COLOUR_NAMES):
            full = f"{colour_name} {name}"
            kinds.append(Kind((full,), (pluralise(full),), False, shape, colour))
    return kinds


def groups(kinds: list[Kind], num_nouns: int) -> list[Phrase]:
    """Names that cover several kinds: apple, animal, vehicle, circle, ..."""
    named = [(name, members) for name, members in group_members().items()]
    for shape, name in enumerate(SHAPES):
        named.append((name, [i for i in range(num_nouns, len(kinds)) if kinds[i].shape == shape]))
    return [Phrase(name, pluralise(name), frozenset(members)) for name, members in named]


@lru_cache(maxsize=1)
def lexicon() -> Lexicon:
    """Build the one lexicon."""
    nouns = noun_kinds()
    kinds = nouns + shape_kinds()
    phrases = tuple(
        tuple(
            Phrase(one, many, frozenset([i]))
            for one, many in zip(kind.names, kind.plurals, strict=True)
        )
        for i, kind in enumerate(kinds)
    )
    listed = groups(kinds, len(nouns))
    groups_of = tuple(tuple(g for g in listed if i in g.kinds) for i in range(len(kinds)))
    return Lexicon(tuple(kinds), phrases, groups_of, len(nouns))
