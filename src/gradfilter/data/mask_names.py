"""Names of the classes of data sets with masks, in the order of their labels."""


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.replace("\n", " ").split(","))


CAMVID = _split("sky, building, pole, road, pavement, tree, sign, fence, car, pedestrian, bicyclist")

VOC = _split("""background, aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, dining table, dog, horse,
motorbike, person, potted plant, sheep, sofa, train, tv monitor""")

CITYSCAPES = _split("""road, sidewalk, building, wall, fence, pole, traffic light, traffic sign, vegetation, terrain, sky,
person, rider, car, truck, bus, train, motorcycle, bicycle""")

ADE20K = _split("""wall, building, sky, floor, tree, ceiling, road, bed, window pane, grass, cabinet, sidewalk, person, earth,
door, table, mountain, plant, curtain, chair, car, water, painting, sofa, shelf, house, sea, mirror, rug, field, armchair, seat,
fence, desk, rock, wardrobe, lamp, bathtub, railing, cushion, base, box, column, signboard, chest of drawers, counter, sand,
sink, skyscraper, fireplace, refrigerator, grandstand, path, stairs, runway, case, pool table, pillow, screen door, stairway,
river, bridge, bookcase, blind, coffee table, toilet, flower, book, hill, bench, countertop, stove, palm, kitchen island,
computer, swivel chair, boat, bar, arcade machine, hovel, bus, towel, light, truck, tower, chandelier, awning, streetlight,
booth, television receiver, airplane, dirt track, apparel, pole, land, bannister, escalator, ottoman, bottle, buffet, poster,
stage, van, ship, fountain, conveyer belt, canopy, washer, plaything, swimming pool, stool, barrel, basket, waterfall, tent,
bag, minibike, cradle, oven, ball, food, step, tank, trade name, microwave, pot, animal, bicycle, lake, dishwasher, screen,
blanket, sculpture, hood, sconce, vase, traffic light, tray, ashcan, fan, pier, crt screen, plate, monitor, bulletin board,
shower, radiator, glass, clock, flag""")
