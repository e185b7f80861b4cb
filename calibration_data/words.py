"""Word lists of the generated documents; hosts, people, firms and places are invented."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


ONES = _words(
    "zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, "
    "fourteen, fifteen, sixteen, seventeen, eighteen, nineteen"
)
TENS = _words("-, -, twenty, thirty, forty, fifty, sixty, seventy, eighty, ninety")
PEOPLE = _words(
    "Amina, Bertil, Chiara, Dov, Esi, Farid, Greta, Hakan, Ines, Jorun, Kofi, Leila, Marek, Noor, "
    "Oskar, Priya, Quentin, Rosa, Sanna, Tomas, Ulla, Viktor, Wanda, Yusuf, Zelda"
)
GOODS = _words(
    "apples, bricks, candles, eggs, envelopes, jars, kites, lamps, notebooks, oranges, pencils, "
    "plates, ropes, seedlings, spoons, tiles"
)
TOWNS = _words(
    "Aldermoor, Brackholm, Castelrio, Dunvale, Eskwater, Farnhithe, Gilsby, Harrowmere, Istrel, "
    "Kestleton, Lyndmouth, Marrowby, Netherfold, Ostramere, Penhallow, Quarrendon, Rothmere, "
    "Stellwick, Thornsea, Ulvik, Varnholt, Westerleigh, Yarrowdale"
)
SURNAMES = _words(
    "Achterberg, Bellweather, Castellan, Dimitrova, Eriksen, Fontaine, Gupta, Hallström, Ibarra, "
    "Jankowski, Kovács, Lindqvist, Mbeki, Nakamura, Okafor, Petridis, Quiroga, Rasmussen, "
    "Saarinen, Tanaka, Usman, Vasquez, Weatherby, Xiang, Yilmaz, Zimmer"
)
SERVICES = _words(
    "billing, catalogue, gateway, inventory, mailer, notifier, orders, reports, search, sessions"
)
HOSTS = _words("amber, basalt, cobalt, dolomite, ember, flint, garnet, heron, iris, jasper")
PARTS = _words(
    "hinge bracket, M6 washer, cork gasket, brass ferrule, oak dowel, copper elbow 15 mm, "
    "fuse 3 A, cable gland, felt pad, ball bearing 608, split pin, reed switch, "
    "thermal paste 5 g, toggle clamp"
)
FOODS = _words(
    "rye loaf, goat's cheese, dozen eggs, blackcurrant jam, smoked trout, new potatoes (kg), "
    "honey 340 g, oat biscuits, apple juice 1 l, walnut oil, plum chutney, fresh pasta, "
    "leeks (bunch), mint tea"
)
