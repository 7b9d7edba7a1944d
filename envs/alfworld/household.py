"""The household behind generated games: what there is, what fits where, and where people keep things.

The regularity worth learning is `HABITS`: an object usually lies in one of two receptacle types. A player who knows it
searches fewer places than one who does not.
"""

from __future__ import annotations

from typing import NamedTuple

HABIT_STRENGTH = 0.75  # chance that an object lies in one of its two habitual receptacle types
FIRST_HABIT_SHARE = 0.6  # ... and then in the first of the two

_FOOD = ("Apple", "Tomato", "Potato", "Bread", "Egg", "Lettuce")
_DISHES = ("Mug", "Cup", "Bowl", "Plate")
_CUTLERY = ("Fork", "Spoon")
_WASHING = ("SoapBar", "SoapBottle", "Cloth", "DishSponge")
_SMALL = ("KeyChain", "CreditCard", "CD", "Pen", "Watch", "CellPhone", "RemoteControl", "AlarmClock")
_BULKY = ("Book", "Laptop", "Newspaper", "Vase", "Pillow")

HABITS = {  # object type -> its two habitual receptacle types, the commoner first
    "Apple": ("Fridge", "DiningTable"),
    "Tomato": ("Fridge", "CounterTop"),
    "Potato": ("CounterTop", "Fridge"),
    "Bread": ("CounterTop", "DiningTable"),
    "Egg": ("Fridge", "CounterTop"),
    "Lettuce": ("Fridge", "CounterTop"),
    "Mug": ("Cabinet", "CounterTop"),
    "Cup": ("Cabinet", "Shelf"),
    "Bowl": ("Shelf", "DiningTable"),
    "Plate": ("Cabinet", "DiningTable"),
    "Fork": ("Drawer", "DiningTable"),
    "Spoon": ("Drawer", "CounterTop"),
    "SoapBar": ("SinkBasin", "CounterTop"),
    "SoapBottle": ("CounterTop", "Cabinet"),
    "Cloth": ("Drawer", "Cabinet"),
    "DishSponge": ("SinkBasin", "Cabinet"),
    "KeyChain": ("SideTable", "Dresser"),
    "CreditCard": ("Dresser", "SideTable"),
    "CD": ("Desk", "Drawer"),
    "Pen": ("Desk", "Drawer"),
    "Watch": ("Dresser", "Drawer"),
    "CellPhone": ("SideTable", "Desk"),
    "RemoteControl": ("Sofa", "SideTable"),
    "AlarmClock": ("SideTable", "Dresser"),
    "Book": ("Shelf", "Desk"),
    "Laptop": ("Desk", "Sofa"),
    "Newspaper": ("Sofa", "SideTable"),
    "Vase": ("Shelf", "SideTable"),
    "Pillow": ("Bed", "Sofa"),
}
LAMP = "DeskLamp"
LAMP_STANDS = {"Desk": 3, "SideTable": 2, "Dresser": 1}  # receptacle type -> weight

_KITCHEN_SURFACES = ("CounterTop", "DiningTable")
_FURNITURE = ("SideTable", "Desk", "Dresser", "Shelf", "Sofa", "Bed")
_ROOM_FOR = {  # objects -> receptacle types they fit in besides their habitual ones
    _FOOD: (*_KITCHEN_SURFACES, "Fridge", "Microwave", "SinkBasin", "GarbageCan"),
    _DISHES: (*_KITCHEN_SURFACES, "Cabinet", "Shelf", "SinkBasin", "Fridge", "Microwave", "SideTable"),
    _CUTLERY: (*_KITCHEN_SURFACES, "Drawer", "SinkBasin", "Cabinet"),
    _WASHING: ("CounterTop", "Cabinet", "SinkBasin", "Drawer", "Shelf", "GarbageCan"),
    _SMALL: (*_FURNITURE, "Drawer", "Safe", "CounterTop", "DiningTable"),
    _BULKY: (*_FURNITURE, "DiningTable", "CounterTop"),
}
RECEPTACLES_FOR = {  # object type -> receptacle types it fits in, sorted
    kind: tuple(sorted({*HABITS[kind], *fitting})) for kinds, fitting in _ROOM_FOR.items() for kind in kinds
}
RECEPTACLES_FOR[LAMP] = tuple(sorted(LAMP_STANDS))

OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})
CLEANABLE = frozenset({*_FOOD, *_DISHES, *_CUTLERY, "SoapBar", "Cloth", "DishSponge"} - {"Bread"})
HEATABLE = frozenset({"Apple", "Tomato", "Potato", "Bread", "Egg", "Mug", "Cup", "Plate"})
COOLABLE = frozenset({*_FOOD, *_DISHES})
MAX_OF_A_KIND = {  # receptacles of one type in a room; large rooms may hold twice as many
    "CounterTop": 3, "DiningTable": 2, "SinkBasin": 2, "Fridge": 1, "Microwave": 1, "Cabinet": 4, "Drawer": 4,
    "Shelf": 4, "GarbageCan": 1, "SideTable": 3, "Desk": 2, "Dresser": 2, "Sofa": 2, "Bed": 2, "Safe": 1,
}  # fmt: skip
MAX_SAME_OBJECT = 4


class Style(NamedTuple):
    """A room style: the first of its 30 scene numbers (as in official names) and its receptacle types with weights."""

    name: str
    first_scene: int
    receptacles: dict[str, int]

    def objects(self) -> tuple[str, ...]:
        """Object types at home here: both habitual receptacle types belong to the room."""
        return tuple(kind for kind, places in HABITS.items() if all(place in self.receptacles for place in places))


KNOWN_STYLES = (
    Style("kitchen", 1, {"Cabinet": 4, "Drawer": 3, "CounterTop": 3, "Shelf": 2, "DiningTable": 2, "SinkBasin": 1,
                         "Fridge": 1, "Microwave": 1, "GarbageCan": 1}),
    Style("diner", 101, {"DiningTable": 3, "CounterTop": 2, "Cabinet": 2, "Shelf": 3, "SinkBasin": 1, "Fridge": 1,
                         "Microwave": 1, "SideTable": 2}),
    Style("living", 201, {"Sofa": 3, "SideTable": 3, "Shelf": 3, "Dresser": 2, "Drawer": 3, "Desk": 1, "Safe": 1,
                          "GarbageCan": 1}),
    Style("bedroom", 301, {"Bed": 2, "Sofa": 1, "SideTable": 3, "Dresser": 2, "Drawer": 4, "Desk": 2, "Shelf": 2,
                           "Safe": 1, "GarbageCan": 1}),
    Style("bathroom", 401, {"SinkBasin": 3, "CounterTop": 3, "Cabinet": 4, "Drawer": 3, "Shelf": 2, "GarbageCan": 1}),
    Style("office", 501, {"Desk": 3, "Shelf": 4, "Drawer": 4, "SideTable": 2, "Dresser": 1, "Sofa": 1, "Safe": 1,
                          "GarbageCan": 1}),
)  # fmt: skip
# One room with everything: combinations of furniture, appliances and things that no known style has.
HELD_OUT_STYLES = (
    Style("studio", 601, {"CounterTop": 2, "DiningTable": 2, "SinkBasin": 1, "Fridge": 1, "Microwave": 1, "Cabinet": 2,
                          "Drawer": 2, "Shelf": 2, "SideTable": 2, "Desk": 2, "Dresser": 2, "Sofa": 2, "Bed": 1}),
)  # fmt: skip
